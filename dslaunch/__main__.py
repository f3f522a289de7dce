"""``python -m dslaunch``."""

from dslaunch.cli.main import entry

if __name__ == "__main__":
    entry()
