"""`python -m deploy` is `specserve`."""

from deploy.cli import main

if __name__ == "__main__":
    main()
