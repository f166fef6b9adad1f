"""`python -m rookworld`, which is what torchrun starts."""

from rookworld.cli.dispatch import main

if __name__ == "__main__":
    raise SystemExit(main())
