"""Model families: finding a checkpoint, loading a tower, and what its attention asks for."""
