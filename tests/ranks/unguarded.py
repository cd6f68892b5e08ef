"""A user's script without `if __name__ == "__main__"`: Lightning runs it once more for each further rank."""

import sys

from tests.ranks.launched import main

main(*map(int, sys.argv[1:]))
