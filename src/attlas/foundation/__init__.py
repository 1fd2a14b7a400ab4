"""What knows nothing of attention: tiles, indices, checks of arguments, files, private names of other libraries."""
