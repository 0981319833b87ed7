"""Station 2: which step does everyone stop at?"""
