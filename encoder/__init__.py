"""vitfleet's encoder: images or texts to vectors, on one device, with one resolved attention backend.

Importing this package loads neither torch nor ray; the submodules that need them import them when they are used.
"""

__version__ = "0.1.0"
