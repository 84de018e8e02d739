"""What is wrong with a machine before a run starts on it: `myxo doctor`. Each finding names the command that mends it.

An *examination* takes the directory of the runs and yields `Diagnosis`; each looks at one thing, changes nothing, and has a deadline of
its own. With a config the checks of `myxo.preflight` are asked as well, as `myxo up` does.
"""
