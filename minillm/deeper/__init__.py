"""What is built on the deeper pages, the engine rooms of the chapters, and what goes with it."""
