"""What each kernel computes, in plain NumPy: float64 or exact integers, written from the definition.

An oracle shares no code with the face of the same name; the tests hold the two against each other.
"""
