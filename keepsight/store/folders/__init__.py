"""A store in a folder: files, their catalogue, the writing thread, check and repair."""
