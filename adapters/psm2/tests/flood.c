/* Two endpoints of one process flood each other with active messages, each from its own thread.
   Each request gets a reply, and neither thread polls before it has sent all its requests. The
   first handler at one end does not return until the other end has sent many requests. Neither
   flood may block the other.

     flood REQUESTS     more than 64 */
#include <psm2.h>
#include <psm2_am.h>
#include <psm2_mq.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include "must.h"

enum { LONG = 64 };

static psm2_ep_t ep[2];
static psm2_epaddr_t to[2];
static int flood, handler[2], answer[2];
static _Atomic int sent[2], handled[2], answered[2], completed[2];

/* Returns the number of the endpoint that runs a handler with this context. */
static int side (void *context)
{
  return context != (void *) &ep[0];
}

static int on_request (psm2_am_token_t token, psm2_amarg_t *args, int nargs, void *src,
                       uint32_t len, void *context)
{
  int me = side (context);
  (void) src, (void) len;
  MUST (nargs == 1 && args[0].u64 == (unsigned) handled[me]);
  while (me == 0 && handled[0] == 0 && sent[1] < LONG)
    sched_yield ();
  handled[me]++;
  MUST (psm2_am_reply_short (token, answer[!me], args, 1, NULL, 0, 0, NULL, NULL) == PSM2_OK);
  return 0;
}

static int on_reply (psm2_am_token_t token, psm2_amarg_t *args, int nargs, void *src, uint32_t len,
                     void *context)
{
  int me = side (context);
  (void) token, (void) src, (void) len;
  MUST (nargs == 1 && args[0].u64 == (unsigned) answered[me]);
  answered[me]++;
  return 0;
}

static void on_completion (void *context)
{
  completed[side (context)]++;
}

static int add (int me, psm2_am_handler_2_fn_t function)
{
  int index;
  void *context = &ep[me];
  MUST (psm2_am_register_handlers_2 (ep[me], &function, 1, &context, &index) == PSM2_OK);
  return index;
}

static void *floods (void *context)
{
  int me = side (context);
  for (int at = 0; at < flood; at++, sent[me]++)
    {
      psm2_amarg_t arg = { .u64 = at };
      MUST (
          psm2_am_request_short (to[me], handler[!me], &arg, 1, NULL, 0, 0, on_completion, context)
          == PSM2_OK);
    }
  /* The other endpoint may still wait for replies and completions from this endpoint. */
  while (completed[0] < flood || completed[1] < flood || answered[0] < flood || answered[1] < flood)
    psm2_poll (ep[me]);
  return NULL;
}

int main (int argc, char **argv)
{
  int major = PSM2_VERNO_MAJOR, minor = PSM2_VERNO_MINOR;
  struct psm2_ep_open_opts opts;
  psm2_uuid_t key = { 19 };
  psm2_epid_t id[2];
  psm2_mq_t mq[2];
  psm2_error_t error;
  pthread_t thread[2];
  flood = argc > 1 ? atoi (argv[1]) : 0;
  MUST (flood > LONG);
  MUST (psm2_init (&major, &minor) == PSM2_OK && psm2_ep_open_opts_get_defaults (&opts) == PSM2_OK);
  for (int me = 0; me < 2; me++)
    {
      MUST (psm2_ep_open (key, &opts, &ep[me], &id[me]) == PSM2_OK
            && psm2_mq_init (ep[me], 0, NULL, 0, &mq[me]) == PSM2_OK);
      handler[me] = add (me, on_request);
      answer[me] = add (me, on_reply);
    }
  for (int me = 0; me < 2; me++)
    MUST (psm2_ep_connect (ep[me], 1, &id[!me], NULL, &error, &to[me], 20000000000) == PSM2_OK);
  /* If the floods block each other, the caller's time limit ends the test. */
  for (int me = 0; me < 2; me++)
    MUST (pthread_create (&thread[me], NULL, floods, &ep[me]) == 0);
  for (int me = 0; me < 2; me++)
    MUST (pthread_join (thread[me], NULL) == 0);
  for (int me = 0; me < 2; me++)
    MUST (answered[me] == flood && completed[me] == flood && handled[me] == flood);
  for (int me = 0; me < 2; me++)
    MUST (psm2_mq_finalize (mq[me]) == PSM2_OK
          && psm2_ep_close (ep[me], PSM2_EP_CLOSE_FORCE, 0) == PSM2_OK);
  MUST (psm2_finalize () == PSM2_OK);
  printf ("2 floods of %d requests, each replied to\n", flood);
  return 0;
}
