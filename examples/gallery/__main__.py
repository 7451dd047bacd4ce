"""``python -m examples.gallery``; see ``_runner``, whose functions other processes import too."""

from ._runner import main

if __name__ == "__main__":
    main()
