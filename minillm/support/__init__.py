"""What serves everywhere: checks, files, devices, counting."""
