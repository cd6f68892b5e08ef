"""A user's script whose further processes are started anew by `multiprocessing`, with its objects pickled."""

from tests.ranks.launched_once import train

if __name__ == "__main__":
    train("spawn")
