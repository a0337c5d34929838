"""The HTP target: lowerings with static shapes, the offline compiler and the simulator. Host tools."""
