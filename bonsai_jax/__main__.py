"""`python -m bonsai_jax` is the command `bonsai-jax`, for a checkout that is not installed."""

from bonsai_jax.cli import main

if __name__ == "__main__":
    main()
