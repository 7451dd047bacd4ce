"""Real data sets: downloaded once, verified by checksum and cached, or read offline from a folder.

    images, labels, *_ = bilevel.data.mnist()

By default the files are downloaded from public mirrors into the platform's cache folder. With
``data_dir`` or the environment variable ``BILEVEL_DATA`` they are read from that folder, and the
network is not used. The SHA-256 of every file is verified each time the file is read.
"""

from bilevel.data.covertype import COVERTYPE, Covertype, covertype, read_covertype
from bilevel.data.files import DataSet, RemoteFile, cache_folder
from bilevel.data.idx import read_idx
from bilevel.data.mnist import MNIST, Mnist, mnist
from bilevel.data.newsgroups import NEWSGROUPS, Newsgroups, newsgroups, read_newsgroups
from bilevel.data.omniglot import OMNIGLOT, Omniglot, omniglot, read_omniglot
from bilevel.data.shakespeare import SHAKESPEARE, read_shakespeare, shakespeare

__all__ = [
    "COVERTYPE",
    "MNIST",
    "NEWSGROUPS",
    "OMNIGLOT",
    "SHAKESPEARE",
    "Covertype",
    "DataSet",
    "Mnist",
    "Newsgroups",
    "Omniglot",
    "RemoteFile",
    "cache_folder",
    "covertype",
    "mnist",
    "newsgroups",
    "omniglot",
    "read_covertype",
    "read_idx",
    "read_newsgroups",
    "read_omniglot",
    "read_shakespeare",
    "shakespeare",
]
