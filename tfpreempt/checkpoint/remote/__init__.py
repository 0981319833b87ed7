"""The copy of a checkpoint directory in an object store.

chosen_store  where a program commits, and which store its commits are copied to
destination   the directory that a download fills
download      fetches a commit into a local directory, and verifies it
exchange      parts of a save of workers that have another disk than the chief
fetch         brings a remote commit into a checkpoint directory, like any other
journals      copies of the journals beside the commits, and their reader
mirror        the copy of a directory, made behind training's back, the newest first
parts         a large file on its way in parts, of which the store makes one object
place         the lease of a place in a store, and what is marked there
ranges        ranges of a file that is downloaded: split, summed up, written into
retention     retention in an object store, and what dead uploads left
scratch       where a run trains whose checkpoint directory is a URL
status        `MirrorStatus`: how far the copies are, for users
tries         how the tries to copy get on, and when a wait gives up
upload        uploads one commit: its files by parallel threads, the manifest
"""
