"""Layers of a run: the life of a replica group in one of them, whichever engine carries its rounds."""
