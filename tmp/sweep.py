import sys
from sim import *
from cpmcu.engine import chooser as C, emitted_tokens as ET
def score(cases, seeds=6):
    out=[]
    for tg,n,rate in cases:
        w=World(measured_h100, constant(rate), tg)
        med,mn,b,e=shares(w,SH,full,n,seeds=seeds)
        out.append(f"{med[1]*100:3.0f}/{med[2]*100:3.0f}({mn[2]*100:2.0f})")
    return " ".join(out)
cases=[(0.0,1,.3),(0.0,1,.5),(0,1,.8),(0.5,1,.3),(.5,1,.5),(.5,1,.8),(.5,4,.8),(0,16,.5),(.5,16,.5)]
def go(name, **kw):
    old={}
    for k,v in kw.items():
        m = C if hasattr(C,k) else ET
        old[m,k]=getattr(m,k); setattr(m,k,v)
    print(name, score(cases), flush=True)
    for (m,k),v in old.items(): setattr(m,k,v)
go("base")
go("fade.995 w96",FADING=.995,WINDOW=96)
go("fade.995 w96 m1.05",FADING=.995,WINDOW=96,MARGIN=1.05)
go("fade.995 w96 m1.05 ap.25",FADING=.995,WINDOW=96,MARGIN=1.05,AFTER_PLAIN=.25)
