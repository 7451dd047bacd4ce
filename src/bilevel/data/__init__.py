"""Real data sets: downloaded once, verified by checksum, cached; or read from a folder, offline.

    images, labels, *_ = bilevel.data.mnist()

Without more, the files are fetched from public mirrors into the platform's cache folder. With
``data_dir``, or the environment variable ``BILEVEL_DATA``, they are read from that folder and the
network is left alone. Every file is verified by its SHA-256 each time it is read.
"""

from bilevel.data.covertype import COVERTYPE, Covertype, covertype, read_covertype
from bilevel.data.files import DataSet, RemoteFile, cache_folder
from bilevel.data.idx import read_idx
from bilevel.data.mnist import MNIST, Mnist, mnist
from bilevel.data.newsgroups import NEWSGROUPS, Newsgroups, newsgroups, read_newsgroups
from bilevel.data.shakespeare import SHAKESPEARE, read_shakespeare, shakespeare

__all__ = [
    "COVERTYPE",
    "MNIST",
    "NEWSGROUPS",
    "SHAKESPEARE",
    "Covertype",
    "DataSet",
    "Mnist",
    "Newsgroups",
    "RemoteFile",
    "cache_folder",
    "covertype",
    "mnist",
    "newsgroups",
    "read_covertype",
    "read_idx",
    "read_newsgroups",
    "read_shakespeare",
    "shakespeare",
]
