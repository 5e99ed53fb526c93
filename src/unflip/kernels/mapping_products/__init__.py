"""LNS's mapping networks of wide layers as matrix products on tensor cores: see ``operator.py``."""
