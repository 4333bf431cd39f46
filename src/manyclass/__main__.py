"""The command line as `python -m manyclass`."""

from manyclass.cli import main

if __name__ == "__main__":
    main()
