throw new Error("cannot load\nthe weights");
