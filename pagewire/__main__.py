import sys

from pagewire.command import main

sys.exit(main())
