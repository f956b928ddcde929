"""What puts fp4comm into other libraries; each module imports only its own host."""
