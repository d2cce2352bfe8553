"""Reading and writing the files of real models."""
