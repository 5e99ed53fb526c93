"""Trained networks: a catalog, and finding them in the package, a folder, a cache, a URL or the Hugging Face Hub.

catalog.json   the networks, with accuracy, size, recipe, license and where each is found
catalog.py     reads it
find.py        the path of a network that was named in any of these ways
download.py    URLs: limits, hashes, the cache
hub.py         the Hugging Face Hub
folder.py      the files of a published network, and their hashes
"""

from unflip.networks.catalog import Entry, entries
from unflip.networks.find import NotPublished, locate

__all__ = ["Entry", "NotPublished", "entries", "locate"]
