"""`python -m vitrail` is `vitrail`."""

from vitrail.cli import console

if __name__ == "__main__":
    console()
