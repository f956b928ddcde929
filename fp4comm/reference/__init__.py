"""The oracle: NumPy, float64 and explicit tables, written to be read and checked, not to be fast.

It shares no code with the C++ and CUDA back ends and follows the definitions over real numbers, so that equality with
them to the last bit is evidence for both.
"""
