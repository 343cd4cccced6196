"""The file formats that Keepsight writes, one file each. May import digests, system and below."""
