"""The bytes that Keepsight writes, one file a format. May import digests, system and below."""
