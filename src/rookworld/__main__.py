"""`python -m rookworld`, which is what torchrun starts."""

from rookworld.cli.door import main

if __name__ == "__main__":
    raise SystemExit(main())
