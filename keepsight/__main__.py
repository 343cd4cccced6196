"""The `keepsight` command, also as `python -m keepsight`: for environments where the command is not
on the path, and for the demo, which starts a second process with its own interpreter.
"""

import signal


def main() -> None:
    """Run the command. Ctrl-C ends it without a traceback also while it starts and when all is
    done: in between, it is raised and the command cleans up."""
    handler = signal.getsignal(signal.SIGINT)
    quiet = signal.SIG_DFL if handler is signal.default_int_handler else handler
    signal.signal(signal.SIGINT, quiet)
    from keepsight.cli.app import main as command  # this takes a while

    signal.signal(signal.SIGINT, handler)
    try:
        command()
    finally:
        signal.signal(signal.SIGINT, quiet)


if __name__ == "__main__":
    main()
