"""What only one family of models needs, a file each."""
