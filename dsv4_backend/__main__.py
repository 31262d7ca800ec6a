"""`python -m dsv4_backend` is the console script `dsv4`."""

from dsv4_backend.cli import main

if __name__ == "__main__":
    main()
