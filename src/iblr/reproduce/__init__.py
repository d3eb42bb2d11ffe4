"""The experiments of the paper, run again: `iblr reproduce`."""
