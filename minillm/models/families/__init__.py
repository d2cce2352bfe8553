"""What only one family of models needs, a file each: its config's keys, its parts, its files."""
