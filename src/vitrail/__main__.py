"""`python -m vitrail` is `vitrail`."""

from vitrail.cli import main

if __name__ == "__main__":
    main()
