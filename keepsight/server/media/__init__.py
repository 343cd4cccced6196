"""The media of a request: fetched, opened, checked and counted; uploads."""
