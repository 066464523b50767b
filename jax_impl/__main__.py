"""`python -m jax_impl`, the same as the `k3` command."""

from jax_impl.cli import main

if __name__ == "__main__":
    main()
