"""Small trainable matrices beside frozen ones."""
