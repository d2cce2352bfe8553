"""Fast training of merges, files of other libraries, chat templates."""
