"""The file formats that Keepsight writes, one file each. May import system and below."""
