"""The htp target's half of a prefill: fixed-size blocks, tile ladder, float16 at every graph's border."""
