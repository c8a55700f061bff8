"""Where the README's figures come from. `python -m bench` prints every table."""
