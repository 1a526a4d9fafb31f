"""The report: what was measured, with its uncertainty, on one page that needs no network.

`gather.py` reads run folders, `analysis.py` computes, `page.py` and `figures.py` write.
"""
