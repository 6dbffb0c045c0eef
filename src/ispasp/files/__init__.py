"""Files on disk: read within limits, written whole or not at all."""
