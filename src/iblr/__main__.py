"""The command line: `iblr reproduce`, also as `python -m iblr reproduce`."""

import sys


def main() -> None:
    """Run the command line, or say in one line what it needs."""
    try:
        from iblr.cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "plotly"):
            raise
        print(f"The command line needs {error.name}: pip install 'iblr[cli]'", file=sys.stderr)
        sys.exit(1)
    app()


if __name__ == "__main__":
    main()
