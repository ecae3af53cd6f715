"""The checks run on the pretended card only, in processes that test_card.py starts: elsewhere they are not collected."""

import sys

collect_ignore = [] if "emucuda" in sys.modules else ["checks"]
