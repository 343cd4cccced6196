"""`python -m keepsight` is the `keepsight` command.

For environments where the command is not on the path, and for the demo, which starts a second
process with its own interpreter.
"""

from keepsight.cli.app import main

if __name__ == "__main__":
    main()
