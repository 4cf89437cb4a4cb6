import sys
from sim import *
n=int(sys.argv[1]); rate=float(sys.argv[2]); tg=float(sys.argv[3]); warm={"now":now,"full":full}[sys.argv[4]]; toks=int(sys.argv[5])
w=World(measured_h100, constant(rate), tg)
e=Engine(w, ShapeChooser(SH), 0, n); e.warm_up(warm)
p=e.policy
import itertools
orig=p.observe
def obs(*a):
    orig(*a); bud.append(p._budget)
bud=[]
p.observe=obs
e.run(toks)
i=0
for s,g in itertools.groupby(e.outcome.shapes):
    k=len(list(g)); i+=k
    print(s,k,"budget %.2f"%bud[i-1], end=" | ")
print()
