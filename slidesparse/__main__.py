"""``python -m slidesparse``, for where the ``slidesparse`` command is not on the PATH."""

from slidesparse.cli import main

if __name__ == "__main__":
    main()
