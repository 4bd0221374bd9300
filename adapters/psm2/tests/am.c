/* Active messages between two endpoints of one process; one endpoint has a thread that polls. Tests
   requests and replies of many lengths in order, late and unknown handlers, the source of a
   message, completions, and wrong calls. */
#include <psm2.h>
#include <psm2_am.h>
#include <psm2_mq.h>
#include <pthread.h>
#include <string.h>

#include "must.h"

enum { ECHO, ANSWER, COUNT, HANDLERS };

static psm2_ep_t ep[2];
static psm2_mq_t mq[2];
static psm2_epaddr_t to[2];
static struct psm2_am_parameters most;
static int number[2][HANDLERS], stop;
static unsigned char out[8192];
static volatile int answers, counted, completed;
static int contexts[2];

static unsigned char byte (unsigned len, unsigned at)
{
  return len * 7 + at * 3 + (at >> 8);
}

static void check (psm2_amarg_t *args, int nargs, unsigned char *src, unsigned len)
{
  for (int at = 0; at < nargs; at++)
    MUST (args[at].u64 == len * 100ull + at);
  for (unsigned at = 0; at < len; at++)
    MUST (src[at] == byte (len, at));
}

static psm2_error_t reply (psm2_am_token_t token, int nargs, unsigned len)
{
  psm2_amarg_t args[8];
  unsigned char bytes[8192];
  for (int at = 0; at < nargs; at++)
    args[at].u64 = len * 100ull + at;
  for (unsigned at = 0; at < len; at++)
    bytes[at] = byte (len, at);
  return psm2_am_reply_short (token, number[0][ANSWER], args, nargs, bytes, len, 0, NULL, NULL);
}

/* Runs at endpoint 1. Replies with the payload, and checks that a second reply fails. */
static int echo (psm2_am_token_t token, psm2_amarg_t *args, int nargs, void *src, uint32_t len,
                 void *context)
{
  psm2_epaddr_t source;
  MUST (context == &contexts[1]);
  check (args, nargs, src, len);
  MUST (psm2_am_get_source (token, &source) == PSM2_OK && source == to[1]);
  MUST (psm2_am_get_source (NULL, &source) == PSM2_PARAM_ERR
        && psm2_am_get_source (token, NULL) == PSM2_PARAM_ERR);
  MUST (reply (token, nargs, most.max_reply_short + 1) == PSM2_PARAM_ERR);
  MUST (reply (NULL, nargs, len) == PSM2_PARAM_ERR);
  MUST (reply (token, nargs, len) == PSM2_OK);
  MUST (reply (token, nargs, len) == PSM2_PARAM_ERR);
  return 0;
}

/* Runs at endpoint 0. */
static int answer (psm2_am_token_t token, psm2_amarg_t *args, int nargs, void *src, uint32_t len,
                   void *context)
{
  MUST (context == &contexts[0]);
  check (args, nargs, src, len);
  MUST (reply (token, nargs, len) == PSM2_PARAM_ERR);
  answers++;
  return 0;
}

/* Runs at endpoint 1. Counts, and checks that a reply fails. */
static int count (psm2_am_token_t token, psm2_amarg_t *args, int nargs, void *src, uint32_t len,
                  void *context)
{
  (void) src, (void) context;
  MUST (nargs == 1 && len == 0 && args[0].u64 == (unsigned long long) counted);
  MUST (reply (token, 0, 0) == PSM2_PARAM_ERR);
  counted++;
  return 0;
}

static void complete (void *context)
{
  MUST (context == &completed);
  completed++;
}

static void *polls (void *none)
{
  while (!__atomic_load_n (&stop, __ATOMIC_ACQUIRE))
    psm2_poll (ep[1]);
  return none;
}

static psm2_error_t request (int handler, int nargs, unsigned len, int flags)
{
  psm2_amarg_t args[16];
  for (int at = 0; at < nargs; at++)
    args[at].u64 = len * 100ull + at;
  for (unsigned at = 0; at < len; at++)
    out[at] = byte (len, at);
  psm2_error_t error =
      psm2_am_request_short (to[0], handler, args, nargs, out, len, flags, NULL, NULL);
  /* The call has copied the payload, so it may be overwritten. */
  memset (out, 0, len);
  return error;
}

static int add (int side, psm2_am_handler_2_fn_t handler)
{
  int index = -1;
  void *context = &contexts[side];
  MUST (psm2_am_register_handlers_2 (ep[side], &handler, 1, &context, &index) == PSM2_OK
        && index >= 0);
  return index;
}

int main (int argc, char **argv)
{
  int major = PSM2_VERNO_MAJOR, minor = PSM2_VERNO_MINOR, index,
      flood = argc > 1 ? atoi (argv[1]) : 1000;
  struct psm2_ep_open_opts opts;
  psm2_uuid_t key = { 17 };
  psm2_epid_t id[2];
  psm2_am_handler_2_fn_t none = NULL, some[2] = { count, count };
  void *context = NULL;
  size_t size = 0;
  psm2_error_t error;
  MUST (psm2_error_register_handler (NULL, PSM2_ERRHANDLER_NO_HANDLER) == PSM2_OK);
  MUST (psm2_init (&major, &minor) == PSM2_OK && psm2_ep_open_opts_get_defaults (&opts) == PSM2_OK);
  for (int side = 0; side < 2; side++)
    {
      MUST (psm2_ep_open (key, &opts, &ep[side], &id[side]) == PSM2_OK
            && psm2_mq_init (ep[side], 0, NULL, 0, &mq[side]) == PSM2_OK);
      MUST (psm2_am_get_parameters (ep[side], &most, sizeof most, &size) == PSM2_OK
            && size == sizeof most);
    }
  MUST (most.max_handlers >= 64 && most.max_nargs >= 2 && most.max_request_short >= 256
        && most.max_reply_short >= 256);
  MUST (psm2_am_get_parameters (ep[0], &most, sizeof most - 1, &size) == PSM2_PARAM_ERR);
  MUST (psm2_am_get_parameters (ep[0], NULL, sizeof most, &size) == PSM2_PARAM_ERR);
  MUST (psm2_am_register_handlers_2 (ep[0], &none, 1, &context, &index) == PSM2_PARAM_ERR);
  MUST (psm2_am_register_handlers_2 (ep[0], some, -1, &context, &index) == PSM2_PARAM_ERR);
  MUST (psm2_am_register_handlers_2 (ep[0], some, most.max_handlers + 1, &context, &index)
        == PSM2_EP_NO_RESOURCES);
  number[0][ANSWER] = add (0, answer);
  number[1][ECHO] = add (1, echo);
  for (int side = 0; side < 2; side++)
    MUST (psm2_ep_connect (ep[side], 1, &id[!side], NULL, &error, &to[side], 20000000000)
          == PSM2_OK);
  pthread_t thread;
  MUST (pthread_create (&thread, NULL, polls, NULL) == 0);

  int sent = 0;
  for (unsigned len = 0; len <= most.max_request_short;
       len += len < 300 || len > most.max_request_short - 10 ? 1 : 97, sent++)
    MUST (request (number[1][ECHO], sent % (most.max_nargs + 1), len, 0) == PSM2_OK);
  MUST (request (number[1][ECHO], most.max_nargs, most.max_request_short, PSM2_AM_FLAG_ASYNC)
        == PSM2_OK);
  for (sent++; answers < sent;)
    psm2_poll (ep[0]);

  MUST (request (number[1][ECHO], 0, most.max_request_short + 1, 0) == PSM2_PARAM_ERR);
  MUST (request (number[1][ECHO], most.max_nargs + 1, 0, 0) == PSM2_PARAM_ERR);
  MUST (request (number[1][ECHO], 0, 0, 4) == PSM2_PARAM_ERR);
  MUST (psm2_am_request_short (to[0], 0, NULL, 1, NULL, 0, 0, NULL, NULL) == PSM2_PARAM_ERR);
  MUST (psm2_am_request_short (to[0], 0, NULL, 0, NULL, 1, 0, NULL, NULL) == PSM2_PARAM_ERR);
  MUST (psm2_am_request_short (NULL, 0, NULL, 0, NULL, 0, 0, NULL, NULL) == PSM2_PARAM_ERR);
  MUST (reply (NULL, 0, 0) == PSM2_PARAM_ERR && reply (&index, 0, 0) == PSM2_PARAM_ERR);

  /* A message to an unknown handler is dropped. Later messages arrive. */
  MUST (request (number[1][ECHO] + 1, 0, 0, 0) == PSM2_OK && request (-1, 0, 0, 0) == PSM2_OK);
  MUST (request (number[1][ECHO], 1, 5, 0) == PSM2_OK);
  for (sent++; answers < sent;)
    psm2_poll (ep[0]);
  number[1][COUNT] = add (1, count);
  for (int at = 0; at < flood; at++)
    {
      psm2_amarg_t arg = { .u64 = at };
      int last = at == flood - 1;
      MUST (psm2_am_request_short (to[0], number[1][COUNT], &arg, 1, NULL, 0, PSM2_AM_FLAG_NOREPLY,
                                   last ? complete : NULL, (void *) &completed)
            == PSM2_OK);
    }
  while (!completed)
    psm2_poll (ep[0]);
  MUST (counted == flood && completed == 1 && answers == sent);

  __atomic_store_n (&stop, 1, __ATOMIC_RELEASE);
  MUST (pthread_join (thread, NULL) == 0);
  for (int side = 0; side < 2; side++)
    MUST (psm2_mq_finalize (mq[side]) == PSM2_OK
          && psm2_ep_close (ep[side], PSM2_EP_CLOSE_FORCE, 0) == PSM2_OK);
  MUST (psm2_finalize () == PSM2_OK);
  printf ("%d requests were answered, %d handled in order\n", sent, counted);
  return 0;
}
